// Package fleet has the tests of many engines at once: sockets that come and go by
// the hundred, and every fault there is befalling engines that work.
package fleet
