--[[
find.lua: what the engine knows of one reservation.

KEYS    the segment
ARGV[1] server   ARGV[2] reservation_id   ARGV[3] buyer   ARGV[4] max orders of a buyer
ARGV[5] how many segments the caller knows of; none: any

Replies a refusal of guard.lua, or the first that applies:
  {'held', epoch, revision, slot, record, unacked}   unacked is 1 or 0
  {'released', epoch, revision}                      the id is marked
  {'not_reserved', epoch, revision}

Invariant: it writes nothing.
]]
local refusal, segment = guard(ARGV[1], false, ARGV[5])
if refusal then
  return refusal
end
local slot, record = find_slot(ARGV[3], ARGV[2], tonumber(ARGV[4]))
if slot then
  local unacked = redis.call('ZSCORE', UNACKED, member_of(ARGV[3], slot, tonumber(ARGV[4])))
  return {'held', segment.epoch, segment.revision, slot, record, unacked and 1 or 0}
end
if redis.call('SISMEMBER', RELEASED, ARGV[2]) == 1 then
  return {'released', segment.epoch, segment.revision}
end
return {'not_reserved', segment.epoch, segment.revision}
