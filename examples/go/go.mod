module inventory.seckill

go 1.21

require (
	google.golang.org/genproto/googleapis/rpc v0.0.0-20240528184218-531527333157
	google.golang.org/grpc v1.66.0
	google.golang.org/protobuf v1.34.2
)
