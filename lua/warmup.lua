--[[
warmup.lua: put a segment on sale for the first time.

KEYS    the segment
ARGV[1] server   ARGV[2] epoch   ARGV[3] units of this segment   ARGV[4] the same; of one that
is alone those of the offer   ARGV[5] expire_time of all keys, ms
ARGV[6] how many segments the offer has; none: 1

Replies, the first that applies:
  {'written', epoch}                nothing was there; now it is
  {'already', epoch}                the same server, epoch, total and units are there, untouched
  {'mismatch', what, found, asked}  anything else; nothing changed

Invariant: it never changes a key that exists; only a rebuild refills.
]]
local server, epoch, units, total, expire_time = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
for i, key in ipairs(KEYS) do
  local kind = redis.call('TYPE', key)['ok']
  local wanted = ({'string', 'set', 'hash', 'set', 'zset', 'hash', 'hash'})[i]
  if kind ~= 'none' and kind ~= wanted then
    return {'mismatch', 'type', kind, wanted}
  end
end
local segments = ARGV[6] or '1'
local meta = redis.call('HMGET', META, 'epoch', 'server', 'total', 'frozen', 'segments')
local stock = redis.call('GET', STOCK)
if meta[1] or stock then
  for _, pair in ipairs({
    {'total', meta[3], total}, {'frozen', meta[4] or '', ''}, {'epoch', meta[1], epoch},
    {'server', meta[2], server}, {'segments', meta[5] or '1', segments}, {'stock', stock, units},
  }) do
    if pair[2] ~= pair[3] then
      return {'mismatch', pair[1], pair[2] or 'missing', pair[3]}
    end
  end
  return {'already', epoch}
end
if redis.call('EXISTS', BUYERS, RESERVATIONS, RELEASED, UNACKED, TRANSFERS) > 0 then
  return {'mismatch', 'keys', 'left over', 'none'}
end
redis.call('SET', STOCK, units, 'PXAT', expire_time)
redis.call('HSET', META, 'epoch', epoch, 'server', server, 'revision', '1', 'total', total,
  'held', '0', 'expire_time', expire_time)
if segments ~= '1' then
  redis.call('HSET', META, 'segments', segments)
end
redis.call('PEXPIREAT', META, expire_time)
return {'written', epoch}
