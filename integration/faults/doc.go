// Package faults has tests that break a deployment of real processes: three NATS
// servers, two bridges, three indexers, engines that publish. Processes are killed and
// paused, their clocks jump, networks are cut, the log is purged, at random points that a seed decides.
// Meanwhile the indexers are asked, and in the end a history of the log says
// which of their answers were wrong, and what is missing or there twice: nothing. The
// log is in one stream or, for every third seed, in three.
//
// KVMESH_FAULT_SEEDS is how many schedules are run, KVMESH_FAULT_SEED the first of
// them.
package faults
