--[[
unacked.lua: read reservations that nobody acknowledged for a while.

KEYS    the segment
ARGV[1] server   ARGV[2] taken before this time, ms   ARGV[3] at most so many, up to 500
ARGV[4] how many segments the caller knows of; none: any

Replies a refusal of guard.lua, or {'ok', epoch, revision, aside, out, member, record, member,
record, …}, the oldest first. All of them were taken under that epoch: a rebuild empties `unacked`.
aside are the units that are set aside for adjustments, which asides.lua names; out those on their
way to other segments, which transfers.lua names.

An entry whose reservation is gone is removed; nothing else changes.
]]
local refusal, segment = guard(ARGV[1], false, ARGV[4])
if refusal then
  return refusal
end
local aside = units_aside()
local out = units_moving()
if not aside or not out then
  return {'frozen', segment.epoch, segment.revision, 'corrupt'}
end
local reply = {'ok', segment.epoch, segment.revision, aside, out}
local members = redis.call('ZRANGEBYSCORE', UNACKED, '-inf', '(' .. ARGV[2], 'LIMIT', 0, ARGV[3])
if #members == 0 then
  return reply
end
local gone = {}
for i, record in ipairs(redis.call('HMGET', RESERVATIONS, unpack(members))) do
  if record then
    reply[#reply + 1] = members[i]
    reply[#reply + 1] = record
  else
    gone[#gone + 1] = members[i]
  end
end
if #gone > 0 then
  redis.call('ZREM', UNACKED, unpack(gone))
end
return reply
