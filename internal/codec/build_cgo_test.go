//go:build cgo

package codec

const allowedAllocs = 0

const builtWithCgo = true
