// Package feed is the oracle of tests that look at the log: a Reader applies
// records to plain maps, one set of sequence hashes a source and tier, and checks
// every rule of docs/record.md that a reader can check.
//
// It is written from that page and shares no code with those who write records or
// read them in earnest: it takes MessagePack apart with another library, and mixes
// digests itself. It is slow, and not for concurrent use.
//
// A Writer is the other end, for tests of those who read the log: it writes what a
// bridge would, with the project's own encoder, from plain maps as well.
package feed
