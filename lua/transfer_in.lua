--[[
transfer_in.lua: put units on sale here that are on their way from another segment, once.

KEYS    the segment that gets them
ARGV[1] server   ARGV[2] epoch under which they went out   ARGV[3] number of the segment they are of
ARGV[4] sequence of the transfer   ARGV[5] units

Replies, the first that applies:
  {'retry', epoch, revision, reason}    a refusal of guard.lua, another epoch among them; nothing
                                        changed, and the other segment must not forget them
  {'already_in', epoch, revision}       they are in since before
  {'in', epoch, revision}               on sale; every server is told if the segment was sold out

Invariant: stock + held + aside + out = total + moved. The last sequence in is kept by source, so a
repeat, however late, puts nothing on sale.
]]
local refusal, segment = guard(ARGV[1], ARGV[2])
if refusal then
  return {'retry', refusal[2], refusal[3], refusal[4] or refusal[1]}
end
local epoch, revision, source, sequence, units =
  segment.epoch, segment.revision, ARGV[3], ARGV[4], ARGV[5]
if not string.match(source, '^%d+$') or not is_count(sequence) or not is_count(units) then
  return redis.error_reply('ERR a segment and whole numbers of at least 1 are needed')
end
local last = tonumber(redis.call('HGET', TRANSFERS, 'in:' .. source) or '0')
if not last then
  return {'retry', epoch, revision, 'corrupt'}
end
if tonumber(sequence) <= last then
  return {'already_in', epoch, revision}
end

note_transfer(segment, 'in:' .. source, sequence)
redis.call('INCRBY', STOCK, units)
redis.call('HINCRBY', META, 'moved', units)
revision = redis.call('HINCRBY', META, 'revision', 1)
if segment.stock == 0 then
  tell_reopened(epoch, revision)
end
return {'in', epoch, revision}
