--[[
transfer_out.lua: take units off sale here, on their way to another segment.

KEYS    the segment that gives
ARGV[1] server   ARGV[2] epoch   ARGV[3] number of the segment that is to get them
ARGV[4] at most so many units

Replies a refusal of guard.lua, or {'ok', epoch, revision, word, sequence, units, stock}, the first
that applies:
  in_flight  so many are on their way there since before, under this sequence; nothing changed
  nothing    there are none on sale here
  out        so many are on their way now: all that are on sale, or as many as asked

Invariant: stock + held + aside + out = total + moved. One transfer is in flight per target, and
their sequences rise. The units are on sale nowhere until transfer_in.lua is told of them.
]]
local refusal, segment = guard(ARGV[1], ARGV[2])
if refusal then
  return refusal
end
local epoch, revision, target, asked = segment.epoch, segment.revision, ARGV[3], ARGV[4]
if not string.match(target, '^%d+$') or not is_count(asked) then
  return redis.error_reply('ERR a segment and a whole number of at least 1 are needed')
end
local sequence, units = find_out(target)
if not sequence then
  return {'frozen', epoch, revision, 'corrupt'}
end
if units ~= '0' then
  return {'ok', epoch, revision, 'in_flight', sequence, units, segment.stock}
end
units = math.min(segment.stock, tonumber(asked))
if units == 0 then
  return {'ok', epoch, revision, 'nothing', sequence, 0, 0}
end

sequence = string.format('%.0f', tonumber(sequence) + 1)
units = string.format('%.0f', units)
note_transfer(segment, 'out:' .. target, sequence .. ' ' .. units)
local stock = redis.call('DECRBY', STOCK, units)
redis.call('HINCRBY', META, 'out', units)
revision = redis.call('HINCRBY', META, 'revision', 1)
return {'ok', epoch, revision, 'out', sequence, units, stock}
