--[[
transfer_done.lua: forget units that have arrived at another segment.

KEYS    the segment that gave them
ARGV[1] server   ARGV[2] epoch under which they went out   ARGV[3] number of the segment that they
went to   ARGV[4] sequence of the transfer

Replies, the first that applies:
  {'retry', epoch, revision, reason}   a refusal of guard.lua, another epoch among them
  {'already', epoch, revision}         nothing is on its way there under this sequence
  {'forgotten', epoch, revision}       they are gone for good; the next may go out

Called only after transfer_in.lua answered `in` or `already_in` under the same epoch: any other
answer, and the units would be lost.
Invariant: stock + held + aside + out = total + moved. Deleting comes first; see release.lua.
]]
local refusal, segment = guard(ARGV[1], ARGV[2])
if refusal then
  return {'retry', refusal[2], refusal[3], refusal[4] or refusal[1]}
end
local epoch, revision, target = segment.epoch, segment.revision, ARGV[3]
local sequence, units = find_out(target)
if not sequence then
  return {'retry', epoch, revision, 'corrupt'}
end
if sequence ~= ARGV[4] or units == '0' then
  return {'already', epoch, revision}
end

note_transfer(segment, 'out:' .. target, sequence .. ' 0')
redis.call('HINCRBY', META, 'out', '-' .. units)
redis.call('HINCRBY', META, 'moved', '-' .. units)
revision = redis.call('HINCRBY', META, 'revision', 1)
return {'forgotten', epoch, revision}
