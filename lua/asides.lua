--[[
asides.lua: read what is set aside in one segment, page by page.

KEYS    the segment
ARGV[1] server   ARGV[2] cursor, 0 at first   ARGV[3] about so many at a time
ARGV[4] how many segments the caller knows of; none: any

Replies a refusal of guard.lua, or {'ok', epoch, revision, cursor, request_id, units, time, …}; the
cursor is 0 at the end, and a page may have nothing. What is set aside all the time is read at
least once.

Invariant: it writes nothing.
]]
local refusal, segment = guard(ARGV[1], false, ARGV[4])
if refusal then
  return refusal
end
local page = redis.call('HSCAN', TRANSFERS, ARGV[2], 'COUNT', ARGV[3])
local reply = {'ok', segment.epoch, segment.revision, page[1]}
for i = 1, #page[2], 2 do
  local request_id = string.match(page[2][i], '^adjust:(.*)$')
  local units, time = string.match(page[2][i + 1], '^set_aside (%d+) (%d+)$')
  if request_id and units then
    reply[#reply + 1] = request_id
    reply[#reply + 1] = units
    reply[#reply + 1] = time
  end
end
return reply
