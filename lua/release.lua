--[[
release.lua: give one reservation back, if it is still there, and mark its id.

KEYS    the segment
ARGV[1] server   ARGV[2] epoch of the outbox row   ARGV[3] reservation_id   ARGV[4] buyer
ARGV[5] max orders of a buyer   ARGV[6] how many segments the caller knows of; none: any

Replies, the first that applies:
  {'retry', epoch, revision, reason}        a refusal of guard.lua, or an epoch below the row's;
                                            nothing changed
  {'not_reserved', epoch, revision, stock}  no such reservation here; only the id is marked
  {'released', epoch, revision, stock}      stock went up by the stored quantity, the buyer's slot
                                            is free, the id is marked; every server is told when
                                            the segment was sold out

Called only after SQL holds the row as releasing, released or refused, and checked the owner there.
Invariant: stock + units in reservations stays the same. Deleting comes first: a server that is
out of memory refuses a script whose first write adds, and runs one whose first write deletes.
]]
local refusal, segment = guard(ARGV[1], false, ARGV[6])
if refusal then
  return {'retry', refusal[2], refusal[3], refusal[4] or refusal[1]}
end
if tonumber(segment.epoch) < tonumber(ARGV[2]) then
  return {'retry', segment.epoch, segment.revision, 'epoch'}
end
local id, buyer, max_orders = ARGV[3], ARGV[4], tonumber(ARGV[5])
local slot, record = find_slot(buyer, id, max_orders)

if not slot then
  local revision = segment.revision
  if redis.call('SADD', RELEASED, id) == 1 then
    redis.call('PEXPIREAT', RELEASED, segment.expire_time)
    revision = redis.call('HINCRBY', META, 'revision', 1)
  end
  return {'not_reserved', segment.epoch, revision, segment.stock}
end

local quantity = units_of(record)
if not quantity then
  return {'retry', segment.epoch, segment.revision, 'corrupt'}
end
local member = member_of(buyer, slot, max_orders)
redis.call('HDEL', RESERVATIONS, member)
redis.call('SREM', BUYERS, member)
redis.call('ZREM', UNACKED, member)
redis.call('SADD', RELEASED, id)
redis.call('PEXPIREAT', RELEASED, segment.expire_time)
local stock = redis.call('INCRBY', STOCK, quantity)
redis.call('HINCRBY', META, 'held', -quantity)
local revision = redis.call('HINCRBY', META, 'revision', 1)
if segment.stock == 0 then
  tell_reopened(segment.epoch, revision)
end
return {'released', segment.epoch, revision, stock}
