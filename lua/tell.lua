--[[
tell.lua: tell every server something.

ARGV[1] server   ARGV[2] the message

Replies {'told'}. A message may get lost; whoever tells must not need it to arrive.
]]
tell(ARGV[2])
return {'told'}
