--[[
set_aside.lua: take unsold units off sale, before SQL takes them off the total.

KEYS    the segment
ARGV[1] server   ARGV[2] epoch   ARGV[3] request_id of the adjustment   ARGV[4] units
ARGV[5] time, ms

Replies a refusal of guard.lua, or {'ok', epoch, revision, word, units}, the first that applies:
  set_aside     so many units are set aside for the request, now or since before
  put_back      it was undone; taken_away: it was finished; added: it is one for more units
  insufficient  so many can be had here, fewer than asked; at least one unit stays in an offer of
                one segment, and where there are several SQL sees to that

Invariant: stock + held + aside + out = total + moved. A request sets aside once; a late repeat
finds what became of it in `transfers`, until a rebuild drops what is set aside.
]]
local refusal, segment = guard(ARGV[1], ARGV[2])
if refusal then
  return refusal
end
local epoch, revision, units = segment.epoch, segment.revision, ARGV[4]
if not is_count(units) then
  return redis.error_reply('ERR units must be a whole number of at least 1')
end
local word, known = find_adjustment(ARGV[3])
if word then
  return {'ok', epoch, revision, word, known}
end
local total, aside = tonumber(segment.total), units_aside()
if not total or not aside then
  return {'frozen', epoch, revision, 'corrupt'}
end
local possible = segment.stock
if not segment.segments then
  possible = math.max(0, math.min(possible, total - aside - 1))
end
if possible < tonumber(units) then
  return {'ok', epoch, revision, 'insufficient', possible}
end

note_adjustment(segment, ARGV[3], 'set_aside ' .. units .. ' ' .. ARGV[5])
redis.call('DECRBY', STOCK, units)
redis.call('HINCRBY', META, 'aside', units)
revision = redis.call('HINCRBY', META, 'revision', 1)
return {'ok', epoch, revision, 'set_aside', units}
