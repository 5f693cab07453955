--[[
forget_aside.lua: SQL has taken these units off the total; so does the engine, once.

KEYS    the segment
ARGV[1] server   ARGV[2] epoch of the adjustment in SQL, that of its set-aside
ARGV[3] request_id of the adjustment
ARGV[4] how many segments the caller knows of; none: any

Replies, the first that applies:
  {'retry', epoch, revision, reason}  a refusal of guard.lua, or an epoch below SQL's
  {'contained', epoch, revision}      a higher epoch: the rebuild dropped what was set aside
  {'already', epoch, revision}        done before
  {'contradiction', epoch, revision}  nothing is set aside for it, as SQL says there was
  {'taken_away', epoch, revision}     the total is lower

Invariant: stock + held + aside + out = total + moved. Deleting comes first; see release.lua.
]]
local refusal, segment = guard(ARGV[1], false, ARGV[4])
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
if word == 'taken_away' then
  return {'already', epoch, revision}
end
if word ~= 'set_aside' then
  return {'contradiction', epoch, revision}
end

note_adjustment(segment, ARGV[3], 'taken_away ' .. units)
redis.call('HINCRBY', META, 'aside', '-' .. units)
redis.call('HINCRBY', META, 'total', '-' .. units)
revision = redis.call('HINCRBY', META, 'revision', 1)
return {'taken_away', epoch, revision}
