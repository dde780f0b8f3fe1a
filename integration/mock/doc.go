// Package mock is a fake inference engine on real sockets: what a KV-cache event
// publisher of vLLM, SGLang and their relatives looks like from outside.
//
// An Engine has a PUB socket and, if wanted, a replay ROUTER with a ring of the
// last batches. It writes events in the Dialect of a release, byte for byte as
// the Python engines do, and can do on purpose what engines do by accident: lose
// batches, restart, repeat themselves, answer replay requests late, partly or not
// at all. A Fleet is many engines with a steady, seeded workload.
//
// It serves the project's tests, its benchmarks and the mock command. Peers may
// send it anything: bad ones lose their connection, and nobody else notices.
package mock
