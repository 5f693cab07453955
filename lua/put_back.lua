--[[
put_back.lua: undo a set-aside; SQL holds its request as cancelled, or for another set-aside.

KEYS    the segment
ARGV[1] server   ARGV[2] epoch of the set-aside   ARGV[3] request_id of the adjustment

Replies, the first that applies:
  {'retry', epoch, revision, reason}  a refusal of guard.lua, or an epoch below the set-aside's
  {'contained', epoch, revision}      a higher epoch: the rebuild dropped what was set aside
  {'already', epoch, revision}        nothing is set aside for it
  {'put_back', epoch, revision}       on sale again; every server is told if nothing was left

Invariant: stock + held + aside + out = total + moved. Deleting comes first; see release.lua.
]]
local refusal, segment = guard(ARGV[1], false)
if refusal then
  return {'retry', refusal[2], refusal[3], refusal[4] or refusal[1]}
end
local epoch, revision = segment.epoch, segment.revision
if tonumber(epoch) < tonumber(ARGV[2]) then
  return {'retry', epoch, revision, 'epoch'}
end
if tonumber(epoch) > tonumber(ARGV[2]) then
  return {'contained', epoch, revision}
end
local word, units = find_adjustment(ARGV[3])
if word ~= 'set_aside' then
  return {'already', epoch, revision}
end

note_adjustment(segment, ARGV[3], 'put_back ' .. units)
redis.call('HINCRBY', META, 'aside', '-' .. units)
redis.call('INCRBY', STOCK, units)
revision = redis.call('HINCRBY', META, 'revision', 1)
if segment.stock == 0 then
  tell_reopened(epoch, revision)
end
return {'put_back', epoch, revision}
