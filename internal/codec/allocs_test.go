package codec
const allowedAllocs = 0
