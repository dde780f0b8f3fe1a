package indexer

// Floor returns the log sequence before which no record is needed any more.
func (x *Indexer) Floor() uint64 { return x.shards[0].floor() }
