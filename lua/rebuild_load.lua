--[[
rebuild_load.lua: load one chunk of what SQL knows.

KEYS    the segment
ARGV[1] server   ARGV[2] epoch   ARGV[3] number of the chunk, from 1
ARGV[4] how many reservations follow, up to 1000
ARGV[5..] per reservation: member, record; then the ids to mark as given back, up to 1000

Replies, the first that applies:
  {'refused', epoch}   another epoch or server, or no rebuild under way; nothing changed
  {'already', chunk}   this chunk was applied before; nothing changed
  {'loaded', chunk}

Invariant: each chunk is applied once, in order.
]]
local meta = redis.call('HMGET', META, 'epoch', 'server', 'frozen', 'chunk', 'expire_time')
local chunk = tonumber(ARGV[3])
if meta[1] ~= ARGV[2] or meta[2] ~= ARGV[1] or meta[3] ~= 'rebuilding'
  or chunk > tonumber(meta[4]) + 1 then
  return {'refused', meta[1] or '0'}
end
if chunk <= tonumber(meta[4]) then
  return {'already', meta[4]}
end
local members, records, marks, held = {}, {}, {}, 0
local first_mark = 5 + 2 * tonumber(ARGV[4])
for i = 5, first_mark - 1, 2 do
  members[#members + 1] = ARGV[i]
  records[#records + 1] = ARGV[i]
  records[#records + 1] = ARGV[i + 1]
  held = held + units_of(ARGV[i + 1])
end
for i = first_mark, #ARGV do
  marks[#marks + 1] = ARGV[i]
end

redis.call('HSET', META, 'chunk', ARGV[3])
if #members > 0 then
  redis.call('SADD', BUYERS, unpack(members))
  redis.call('HSET', RESERVATIONS, unpack(records))
  redis.call('HINCRBY', META, 'held', held)
end
if #marks > 0 then
  redis.call('SADD', RELEASED, unpack(marks))
end
for _, key in ipairs({BUYERS, RESERVATIONS, RELEASED}) do
  redis.call('PEXPIREAT', key, meta[5])
end
return {'loaded', ARGV[3]}
