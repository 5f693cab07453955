--[[
prelude.lua: what the embedded engine's VM has besides its keyspace; run once when it starts.

It gets the functions of the engine and returns
  environment   the globals of every script: what Redis offers, less what could leave the script,
                block it, or differ from one run to the next
  enter         runs a script: enter(script, KEYS, ARGV) gives its reply, or nil and an error text

run and run_many take how many arguments there are, and the arguments; see lua.rs.
]]
local run, run_many, run_exactly = ...
local error, find, gsub, pcall, select, setmetatable, sub, tostring, type =
  error, string.find, string.gsub, pcall, select, setmetatable, string.sub, tostring, type

local redis = {}

-- Most calls have few arguments, none of which could be a number in disguise: see lua.rs for
-- what is told apart here. Spelled out twice, since this is where most of the time goes.
function redis.call(...)
  local count = select('#', ...)
  local reply, refusal
  if count <= 8 then
    reply, refusal = run(count, ...)
  else
    reply, refusal = run_many(count, {...})
  end
  if not refusal then
    return reply
  end
  if refusal == 'exactly' then
    reply, refusal = run_exactly(...)
    if not refusal then
      return reply
    end
  end
  error({err = refusal}, 0)
end

function redis.pcall(...)
  local reply, refusal = run_exactly(...)
  if refusal then
    return {err = refusal}
  end
  return reply
end

local function one_text(...)
  return select('#', ...) == 1 and type((...)) == 'string'
end

function redis.status_reply(...)
  if not one_text(...) then
    return {err = 'ERR wrong number or type of arguments'}
  end
  return {ok = (...)}
end

-- Redis takes the first word for a code, and puts ERR before a text of one word.
function redis.error_reply(...)
  if not one_text(...) then
    return {err = 'ERR wrong number or type of arguments'}
  end
  local text = (...)
  if sub(text, 1, 1) == '-' then
    text = sub(text, 2)
  end
  text = gsub(gsub(text, '^[\r\n]+', ''), '[\r\n]+$', '')
  if not find(text, ' ', 1, true) then
    text = 'ERR ' .. text
  end
  return {err = text}
end

local library = {redis = redis}
for _, name in ipairs({
  'assert', 'error', 'ipairs', 'next', 'pairs', 'select', 'tonumber', 'tostring', 'type', 'unpack',
}) do
  library[name] = _G[name]
end

-- Libraries are read through proxies, so that no script can leave something behind in them.
local function locked(inner)
  return setmetatable({}, {
    __index = inner,
    __newindex = function()
      error('Attempt to modify a readonly table', 2)
    end,
    __metatable = false,
  })
end

math.random, math.randomseed, string.dump = nil, nil, nil
for name, inner in pairs({string = string, table = table, math = math, redis = redis}) do
  library[name] = locked(inner)
end
getmetatable('').__index = library.string
getmetatable('').__metatable = false

setmetatable(library, {
  __index = function(_, name)
    error("Script attempted to access nonexistent global variable '" .. tostring(name) .. "'", 2)
  end,
})
-- Empty, so that each assignment is one of something new.
local environment = setmetatable({}, {
  __index = library,
  __newindex = function()
    error('Attempt to modify a readonly table', 2)
  end,
  __metatable = false,
})

local function enter(script, keys, args)
  local ran, reply = pcall(script, keys, args)
  if ran then
    return reply
  end
  if type(reply) == 'table' then
    return nil, reply.err or 'ERR unknown error'
  end
  return nil, 'ERR ' .. tostring(reply)
end

return environment, enter
