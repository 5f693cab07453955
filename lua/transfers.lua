--[[
transfers.lua: read what is on its way from one segment to others.

KEYS    the segment
ARGV[1] server   ARGV[2] epoch   ARGV[3] how many segments the offer has, up to 256

Replies a refusal of guard.lua, or {'ok', epoch, revision, target, sequence, units, target, …}

Invariant: it writes nothing.
]]
local refusal, segment = guard(ARGV[1], ARGV[2], ARGV[3])
if refusal then
  return refusal
end
local fields = {}
for target = 0, tonumber(ARGV[3]) - 1 do
  fields[#fields + 1] = 'out:' .. target
end
local reply = {'ok', segment.epoch, segment.revision}
for i, known in ipairs(redis.call('HMGET', TRANSFERS, unpack(fields))) do
  local sequence, units = string.match(known or '', '^(%d+) (%d+)$')
  if units and units ~= '0' then
    reply[#reply + 1] = i - 1
    reply[#reply + 1] = sequence
    reply[#reply + 1] = units
  end
end
return reply
