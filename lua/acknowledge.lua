--[[
acknowledge.lua: SQL holds these reservations; take them off `unacked`.

KEYS    the segment
ARGV[1] server   ARGV[2] epoch
ARGV[3..] per reservation: member, order_no, expire_time in ms or 0

Replies a refusal of guard.lua, or {'ok', epoch, revision, acknowledged}.

A reservation is left alone unless its stored order_no is the one acknowledged: a late
acknowledgement of a first take must not hide a re-take of the same id. The expire_time goes into
the record, so that a replay is answered without SQL.
]]
local refusal, segment = guard(ARGV[1], ARGV[2])
if refusal then
  return refusal
end
local members = {}
for i = 3, #ARGV, 3 do
  members[#members + 1] = ARGV[i]
end
local gone, changed = {}, {}
for i, record in ipairs(redis.call('HMGET', RESERVATIONS, unpack(members))) do
  local order_no, expire_time = ARGV[3 * i + 1], ARGV[3 * i + 2]
  local head, stored = string.match(record or '', '^(%S+ %S+ (%S+) %S+) %S+$')
  if stored == order_no then
    gone[#gone + 1] = members[i]
    if expire_time ~= '0' then
      changed[#changed + 1] = members[i]
      changed[#changed + 1] = head .. ' ' .. expire_time
    end
  end
end
if #gone > 0 then
  redis.call('ZREM', UNACKED, unpack(gone))
end
if #changed > 0 then
  redis.call('HSET', RESERVATIONS, unpack(changed))
end
return {'ok', segment.epoch, segment.revision, #gone}
