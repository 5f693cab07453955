--[[
holdings.lua: read the reservations of one segment, page by page.

KEYS    the segment
ARGV[1] server   ARGV[2] cursor, 0 at first   ARGV[3] about so many at a time
ARGV[4] how many segments the caller knows of; none: any

Replies a refusal of guard.lua, or {'ok', epoch, revision, cursor, member, record, …}; the cursor is
0 at the end. A reservation that is there all the time is read at least once; one that comes or
goes meanwhile may be missed, and one may be read twice.

Invariant: it writes nothing.
]]
local refusal, segment = guard(ARGV[1], false, ARGV[4])
if refusal then
  return refusal
end
local page = redis.call('HSCAN', RESERVATIONS, ARGV[2], 'COUNT', ARGV[3])
local reply = {'ok', segment.epoch, segment.revision, page[1]}
for _, value in ipairs(page[2]) do
  reply[#reply + 1] = value
end
return reply
