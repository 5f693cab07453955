--[[
ping.lua: the smallest script; tells that scripts run.

KEYS    none
ARGV[1] server

Replies {'ok'}.
]]
return {'ok'}
