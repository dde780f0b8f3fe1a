package residency

// Reason is why an event, or a part of one, counts for nothing.
type Reason string

// The reasons. The text is the label in metrics and in /workers.
const (
	// NotMain: the event is about a KV cache group whose blocks don't hold
	// whole prefixes, such as one of sliding-window attention.
	NotMain Reason = "not_main_attention"
	// Remote: another worker holds the blocks.
	Remote Reason = "remote"
	// UnknownOwner: the event is about the memory of neither the engine nor a
	// cache owner.
	UnknownOwner Reason = "unknown_ownership"
	// UnknownMedium: the media table does not know where the blocks are.
	UnknownMedium Reason = "unknown_medium"
	// NoBlocks: a store of no blocks.
	NoBlocks Reason = "no_blocks"
	// UnknownBlock: a removal, or a store without tokens, names a block that
	// the engine has not told of.
	UnknownBlock Reason = "unknown_block"
	// OwnParent: a block is said to be its own parent, or to follow a block
	// that stands behind it. It and what the store has behind it stay as they
	// were.
	OwnParent Reason = "own_parent"
	// RepeatedHash: a store names a block twice.
	RepeatedHash Reason = "repeated_hash"
	// BlockSize: the engine's block size is no multiple of the index's.
	BlockSize Reason = "block_size"
	// TokenCount: the tokens don't fill the blocks exactly, so nothing says
	// which tokens a block holds.
	TokenCount Reason = "token_count"
	// TooManyGroups: more combinations of tier, owner and group than a State
	// tells apart.
	TooManyGroups Reason = "too_many_groups"
	// TooManyParked: too many blocks wait for a parent already.
	TooManyParked Reason = "too_many_parked"
)
