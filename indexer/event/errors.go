package event

import "errors"

// Errors of this package. All others wrap one of them.
var (
	// ErrSubject: a subject or a key is not that of a source.
	ErrSubject = errors.New("event: bad subject")
	// ErrLog: the log that is there is split otherwise, or its streams are not
	// what they have to be. The text says what to do.
	ErrLog = errors.New("event: another log")
	// ErrVersion: a record is of a version that this reader does not know.
	ErrVersion = errors.New("event: unknown record version")
	// ErrRecord: a record is malformed.
	ErrRecord = errors.New("event: malformed record")
	// ErrWorker: a worker's registration is not valid. The text names the
	// field and says what would do.
	ErrWorker = errors.New("invalid worker")
	// ErrConflict: a registration contradicts what is registered. The text
	// says how.
	ErrConflict = errors.New("conflict")
	// ErrNotRegistered: there is no such worker.
	ErrNotRegistered = errors.New("not registered")
)
