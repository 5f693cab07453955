--[[
members.lua: read the buyers, or the marked ids, of one segment, page by page.

KEYS    the segment
ARGV[1] server   ARGV[2] buyers | released   ARGV[3] cursor, 0 at first
ARGV[4] about so many at a time

Replies a refusal of guard.lua, or {'ok', epoch, revision, stock, cursor, member, …}; the cursor is
0 at the end. Pages of one epoch and revision together are everything; a member may come twice.

Invariant: it writes nothing.
]]
local refusal, segment = guard(ARGV[1], false)
if refusal then
  return refusal
end
local key = ARGV[2] == 'buyers' and BUYERS or RELEASED
local page = redis.call('SSCAN', key, ARGV[3], 'COUNT', ARGV[4])
local reply = {'ok', segment.epoch, segment.revision, segment.stock, page[1]}
for _, member in ipairs(page[2]) do
  reply[#reply + 1] = member
end
return reply
