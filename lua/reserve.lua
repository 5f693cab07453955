--[[
reserve.lua: take units for up to 64 requests of one segment, in the order given.

KEYS    the segment: stock buyers reservations released unacked meta transfers
KEYS[8..] with a limit: one key per request, which counts the attempts of its buyer; or `stock` for
        one that was counted before and is made again
ARGV[1] server   ARGV[2] epoch   ARGV[3] max orders of a buyer   ARGV[4] time, ms
ARGV[5] how many attempts a buyer has in a window, 0: no limit   ARGV[6] the window, ms
ARGV[7..] per request: buyer, reservation_id, quantity, order_no

Replies a refusal of guard.lua, or {'ok', epoch, revision, stock, answer, answer, …} with one
answer per request, each the first that applies:
  {'replayed', slot, record, unacked}   this buyer holds this reservation_id; unacked is 1 or 0
  {'released'}                          the id is marked: given back, or refused by SQL
  {'rate_limited', ms}                  too many attempts; the window ends in so many ms
  {'duplicate', slot, record, unacked}  all slots are taken; the reservation in the lowest one
  {'sold_out'}                          nothing left
  {'insufficient', stock}               fewer left than asked
  {'taken', slot}                       the lowest free slot; in `unacked` until acknowledged

Invariant: stock + units in reservations stays the same; a missing key is never made; a refused
request changes nothing but its count. A quantity that is not a whole number >= 1 fails the call.
]]
local refusal, segment = guard(ARGV[1], ARGV[2])
if refusal then
  return refusal
end
local max_orders, now = tonumber(ARGV[3]), ARGV[4]
local limit, window = tonumber(ARGV[5]), ARGV[6]
local stock = segment.stock

local requests, members, ids = {}, {}, {}
for i = 7, #ARGV, 4 do
  local quantity = tonumber(ARGV[i + 2])
  if not quantity or quantity < 1 or quantity % 1 ~= 0 then
    return redis.error_reply('ERR quantity must be a whole number of at least 1')
  end
  requests[#requests + 1] = {
    buyer = ARGV[i], id = ARGV[i + 1], quantity = quantity, order_no = ARGV[i + 3],
  }
  ids[#ids + 1] = ARGV[i + 1]
  for slot = 1, max_orders do
    members[#members + 1] = member_of(ARGV[i], slot, max_orders)
  end
end

-- What is held already: record by member, and which of the ids are marked.
local records = {}
local held = {}
for i, is_member in ipairs(redis.call('SMISMEMBER', BUYERS, unpack(members))) do
  if is_member == 1 then
    held[#held + 1] = members[i]
  end
end
if #held > 0 then
  for i, record in ipairs(redis.call('HMGET', RESERVATIONS, unpack(held))) do
    if not record then
      return {'frozen', segment.epoch, segment.revision, 'corrupt'}
    end
    records[held[i]] = record
  end
end
local marked = redis.call('SMISMEMBER', RELEASED, unpack(ids))

local taken_here = {}
local function held_in(buyer, slot)
  local member = member_of(buyer, slot, max_orders)
  local unacked = taken_here[member] or redis.call('ZSCORE', UNACKED, member)
  return slot, records[member], unacked and 1 or 0
end

-- Counts an attempt; how long its buyer has to wait, if it was one too many. A server that is out
-- of memory does not count, and refuses nobody for that.
local function wait_of(attempts)
  if redis.call('EXISTS', attempts) == 0 then
    redis.pcall('SET', attempts, '1', 'PX', window)
    return nil
  end
  local count = redis.pcall('INCRBY', attempts, 1)
  if type(count) == 'number' and count > limit then
    return redis.call('PTTL', attempts)
  end
  return nil
end

local answers = {}
local new_members, new_records, new_unacked = {}, {}, {}
for i, request in ipairs(requests) do
  local free, mine, other
  for slot = 1, max_orders do
    local record = records[member_of(request.buyer, slot, max_orders)]
    if not record then
      free = free or slot
    elseif names(record, request.id) then
      mine = slot
      break
    else
      other = other or slot
    end
  end
  local answer
  local is_known = mine or marked[i] == 1
  local wait = limit > 0 and not is_known and KEYS[7 + i] ~= STOCK and wait_of(KEYS[7 + i])
  if mine then
    answer = {'replayed', held_in(request.buyer, mine)}
  elseif marked[i] == 1 then
    answer = {'released'}
  elseif wait then
    answer = {'rate_limited', wait}
  elseif not free then
    answer = {'duplicate', held_in(request.buyer, other)}
  elseif stock == 0 then
    answer = {'sold_out'}
  elseif stock < request.quantity then
    answer = {'insufficient', stock}
  else
    local member = member_of(request.buyer, free, max_orders)
    local record = table.concat({request.id, ARGV[4 * i + 5], request.order_no, now, '0'}, ' ')
    stock = stock - request.quantity
    records[member], taken_here[member] = record, true
    new_members[#new_members + 1] = member
    new_records[#new_records + 1] = member
    new_records[#new_records + 1] = record
    new_unacked[#new_unacked + 1] = now
    new_unacked[#new_unacked + 1] = member
    answer = {'taken', free}
  end
  answers[i] = answer
end

-- All checks are done; from here on it only writes.
local revision = segment.revision
if #new_members > 0 then
  redis.call('SADD', BUYERS, unpack(new_members))
  redis.call('HSET', RESERVATIONS, unpack(new_records))
  redis.call('ZADD', UNACKED, unpack(new_unacked))
  redis.call('DECRBY', STOCK, segment.stock - stock)
  redis.call('HINCRBY', META, 'held', segment.stock - stock)
  revision = redis.call('HINCRBY', META, 'revision', 1)
  for _, key in ipairs({BUYERS, RESERVATIONS, UNACKED}) do
    redis.call('PEXPIREAT', key, segment.expire_time)
  end
end
return {'ok', segment.epoch, revision, stock, unpack(answers)}
