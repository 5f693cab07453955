--[[
add_units.lua: put more units of an offer on sale, once; SQL counts them in the total already.

KEYS    the segment
ARGV[1] server   ARGV[2] epoch under which SQL added them   ARGV[3] request_id of the adjustment
ARGV[4] units   ARGV[5] how many segments the caller knows of; none: any

Replies, the first that applies:
  {'retry', epoch, revision, reason}  a refusal of guard.lua, or an epoch below SQL's
  {'contained', epoch, revision}      a higher epoch: the rebuild counted them
  {'already', epoch, revision}        added before
  {'contradiction', epoch, revision}  the request is known here as one that takes units away
  {'added', epoch, revision}          on sale; every server is told if the segment was sold out

Invariant: stock + held + aside + out = total + moved. What was done stays in `transfers` until the
next rebuild, so a late repeat adds nothing.
]]
local refusal, segment = guard(ARGV[1], false, ARGV[5])
if refusal then
  return {'retry', refusal[2], refusal[3], refusal[4] or refusal[1]}
end
local epoch, revision, units = segment.epoch, segment.revision, ARGV[4]
if tonumber(epoch) < tonumber(ARGV[2]) then
  return {'retry', epoch, revision, 'epoch'}
end
if tonumber(epoch) > tonumber(ARGV[2]) then
  return {'contained', epoch, revision}
end
if not is_count(units) then
  return redis.error_reply('ERR units must be a whole number of at least 1')
end
local word = find_adjustment(ARGV[3])
if word then
  return {word == 'added' and 'already' or 'contradiction', epoch, revision}
end
local total = tonumber(segment.total)
if not total then
  return {'retry', epoch, revision, 'corrupt'}
end
if total + tonumber(units) > MAX_TOTAL then
  -- SQL took others away already; they are forgotten here in a moment.
  return {'retry', epoch, revision, 'full'}
end

note_adjustment(segment, ARGV[3], 'added ' .. units)
redis.call('INCRBY', STOCK, units)
redis.call('HINCRBY', META, 'total', units)
revision = redis.call('HINCRBY', META, 'revision', 1)
if segment.stock == 0 then
  tell_reopened(epoch, revision)
end
return {'added', epoch, revision}
