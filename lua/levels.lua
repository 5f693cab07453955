--[[
levels.lua: read the figures of one segment.

KEYS    the segment
ARGV[1] server

Replies a refusal of guard.lua, or
  {'ok', epoch, revision, stock, total, held, reservations, unacked, aside}
                       total is that of the whole offer, held the units of the reservations, aside
                       those that were set aside for adjustments

Invariant: it writes nothing.
]]
local refusal, segment = guard(ARGV[1], false)
if refusal then
  return refusal
end
local aside = units_aside()
if not aside then
  return {'frozen', segment.epoch, segment.revision, 'corrupt'}
end
return {
  'ok', segment.epoch, segment.revision, segment.stock, tonumber(segment.total), segment.held,
  redis.call('HLEN', RESERVATIONS), redis.call('ZCARD', UNACKED),
  aside,
}
