--[[
levels.lua: read the figures of one segment.

KEYS    the segment
ARGV[1] server   ARGV[2] how many segments the caller knows of; none: any

Replies a refusal of guard.lua, or
  {'ok', epoch, revision, stock, total, held, reservations, unacked, aside, out, moved,
   oldest}
                       total are the units that the segment was given, of one that is alone those of
                       the offer; held those of the reservations, aside those that are set aside for
                       adjustments, out those on their way to other segments, moved those that came
                       from others less those that went there for good, oldest when the reservation
                       was taken that has been unacknowledged longest, or '' if none is

Invariant: it writes nothing.
]]
local refusal, segment = guard(ARGV[1], false, ARGV[2])
if refusal then
  return refusal
end
local aside = units_aside()
local out, moved = units_moving()
if not aside or not out or not moved then
  return {'frozen', segment.epoch, segment.revision, 'corrupt'}
end
local oldest = redis.call('ZRANGEBYSCORE', UNACKED, '-inf', '+inf', 'LIMIT', 0, 1)[1]
return {
  'ok', segment.epoch, segment.revision, segment.stock, tonumber(segment.total), segment.held,
  redis.call('HLEN', RESERVATIONS), redis.call('ZCARD', UNACKED),
  aside, out, moved, oldest and redis.call('ZSCORE', UNACKED, oldest) or '',
}
