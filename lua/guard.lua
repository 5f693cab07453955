--[[
guard.lua: what every script checks before it does anything; put in front of each of them.

guard(server, epoch, segments) reads `meta` and `stock` of the segment. It returns a refusal, which
the script replies as it is, or nil and the segment. The refusals, the first that applies:
  {'not_warmed', '0', '0'}                   neither `stock` nor `meta` is there
  {'frozen', epoch, revision, 'missing'}     one of the two is there without the other or `held`
  {'frozen', epoch, revision, 'server'}      written under another server identity
  {'frozen', epoch, revision, <reason>}      the flag is set; `rebuilding` while a rebuild runs
  {'frozen', epoch, revision, 'epoch'}       another epoch than the caller's (epoch false: any)
  {'frozen', epoch, revision, 'segments'}    the offer has another number of segments than the
                                             caller knows of (segments nil: any)
  {'frozen', epoch, revision, 'corrupt'}     stock or `held` is not a whole number >= 0

A refusal as frozen ends with the number of segments, where there is more than one: who adopts a
higher epoch must know that it is of as many.

Invariant: it writes nothing.
]]
local STOCK, BUYERS, RESERVATIONS, RELEASED = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local UNACKED, META, TRANSFERS = KEYS[5], KEYS[6], KEYS[7]

local function guard(server, epoch, segments)
  local meta = redis.call('HMGET', META, 'epoch', 'server', 'revision', 'frozen', 'total',
    'expire_time', 'held', 'segments')
  local stock = redis.call('GET', STOCK)
  if not stock and not meta[1] then
    return {'not_warmed', '0', '0'}
  end
  local reason
  local units = tonumber(stock)
  if not meta[1] then
    reason = 'missing'
  elseif meta[2] ~= server then
    reason = 'server'
  elseif meta[4] then
    reason = meta[4]
  elseif not stock or not meta[7] then
    reason = 'missing'
  elseif epoch and meta[1] ~= epoch then
    reason = 'epoch'
  elseif segments and (meta[8] or '1') ~= segments then
    reason = 'segments'
  elseif not units or units < 0 or units % 1 ~= 0 or not string.match(meta[7], '^%d+$') then
    reason = 'corrupt'
  end
  if reason then
    return {'frozen', meta[1] or '0', meta[3] or '0', reason, meta[8] or nil}
  end
  return nil, {
    epoch = meta[1], revision = meta[3], stock = units, total = meta[5], expire_time = meta[6],
    held = meta[7], segments = meta[8],
  }
end

-- Tells every server something; a message may get lost, and one that is not allowed is.
local function tell(message)
  redis.pcall('PUBLISH', 'sk:events', message)
end

-- Tells every server that the segment may have units again.
local function tell_reopened(epoch, revision)
  tell('reopened ' .. STOCK .. ' ' .. epoch .. ' ' .. revision)
end

-- The member of `buyers` and field of `reservations` that stands for one slot of a buyer.
local function member_of(buyer, slot, max_orders)
  if max_orders == 1 then
    return buyer
  end
  return buyer .. '#' .. slot
end

-- The units of a record; or nil.
local function units_of(record)
  return tonumber(string.match(record, '^%S+ (%d+) '))
end

-- Whether a record, 'reservation_id quantity order_no time expire_time', is of this reservation.
local function names(record, reservation_id)
  return string.sub(record, 1, #reservation_id + 1) == reservation_id .. ' '
end

-- The lowest slot in which a buyer holds this reservation, and its record; or nil.
local function find_slot(buyer, reservation_id, max_orders)
  for slot = 1, max_orders do
    local record = redis.call('HGET', RESERVATIONS, member_of(buyer, slot, max_orders))
    if record and names(record, reservation_id) then
      return slot, record
    end
  end
  return nil
end

-- The most units of an offer: beyond it not every whole number is a Lua number.
local MAX_TOTAL = 9007199254740991

local function is_count(text)
  return string.match(text, '^[1-9]%d*$') ~= nil and tonumber(text) <= MAX_TOTAL
end

-- Units set aside for adjustments that SQL has yet to decide or the engine to forget; nil: corrupt.
local function units_aside()
  local aside = redis.call('HGET', META, 'aside') or '0'
  return string.match(aside, '^%d+$') and tonumber(aside)
end

-- Units on their way to other segments; and how many of this segment's came from others, less those
-- that went to others for good. Either nil: corrupt.
local function units_moving()
  local meta = redis.call('HMGET', META, 'out', 'moved')
  local out, moved = meta[1] or '0', meta[2] or '0'
  return string.match(out, '^%d+$') and tonumber(out),
    string.match(moved, '^-?%d+$') and tonumber(moved)
end

-- What is on its way to a segment, `sequence units`: both; units are 0 when nothing is.
local function find_out(target)
  local known = redis.call('HGET', TRANSFERS, 'out:' .. target)
  if known then
    return string.match(known, '^(%d+) (%d+)$')
  end
  return '0', '0'
end

-- Notes a sequence and its units in `transfers`; the first write of its script, deleting first.
local function note_transfer(segment, field, text)
  redis.call('HDEL', TRANSFERS, field)
  redis.call('HSET', TRANSFERS, field, text)
  redis.call('PEXPIREAT', TRANSFERS, segment.expire_time)
end

-- What the segment knows of an adjustment, `set_aside units time` or `word units`: word and units.
local function find_adjustment(request_id)
  local known = redis.call('HGET', TRANSFERS, 'adjust:' .. request_id)
  if known then
    return string.match(known, '^(%S+) (%d+)')
  end
end

-- Notes what became of an adjustment; the first write of its script.
local function note_adjustment(segment, request_id, text)
  redis.call('HDEL', TRANSFERS, 'adjust:' .. request_id)
  redis.call('HSET', TRANSFERS, 'adjust:' .. request_id, text)
  redis.call('PEXPIREAT', TRANSFERS, segment.expire_time)
end
