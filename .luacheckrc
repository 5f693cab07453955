-- The scripts run in Redis and, in Lua 5.1, inside the server. Both give them these globals and no
-- others: cjson, cmsgpack, bit and struct exist in Redis only.
std = 'lua51'
read_globals = { 'redis', 'KEYS', 'ARGV' }
max_line_length = 100
color = false

-- The server puts guard.lua in front of every other script, so its locals are theirs as well. Which
-- ones that are is read from the file.
local guard = 'lua/guard.lua'
files[guard] = { ignore = { '211' } }
for line in io.lines(guard) do
  local names = line:match('^local function ([%w_]+)') or line:match('^local ([%w_, ]+)')
  for name in (names or ''):gmatch('[%w_]+') do
    read_globals[#read_globals + 1] = name
  end
end
