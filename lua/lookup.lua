--[[
lookup.lua: read the reservations of up to 500 members.

KEYS    the segment
ARGV[1] server   ARGV[2..] members

Replies a refusal of guard.lua, or {'ok', epoch, revision, record, unacked, record, unacked, …}, one
pair per member: record is '' where the member holds nothing, unacked is 1 or 0.

Invariant: it writes nothing.
]]
local refusal, segment = guard(ARGV[1], false)
if refusal then
  return refusal
end
local reply = {'ok', segment.epoch, segment.revision}
local members = {unpack(ARGV, 2)}
for i, record in ipairs(redis.call('HMGET', RESERVATIONS, unpack(members))) do
  reply[#reply + 1] = record or ''
  reply[#reply + 1] = redis.call('ZSCORE', UNACKED, members[i]) and 1 or 0
end
return reply
