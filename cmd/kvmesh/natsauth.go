package main

import (
	"errors"
	"fmt"
	"os"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/spf13/pflag"
)

// natsAuth is as whom, and how, NATS is spoken to.
type natsAuth struct {
	creds, nkey    string // files
	user, password string
	token          string
	ca, cert, key  string // files
	domain         string
}

func (a *natsAuth) add(flags *pflag.FlagSet) {
	flags.StringVar(&a.creds, "nats-creds", "", "credentials file for NATS: a user's JWT and seed")
	flags.StringVar(&a.nkey, "nats-nkey", "", "file with the seed of a user's nkey for NATS")
	flags.StringVar(&a.user, "nats-user", "", "user name for NATS")
	flags.StringVar(&a.password, "nats-password", "", "password for NATS; better given in the environment")
	flags.StringVar(&a.token, "nats-token", "", "token for NATS; better given in the environment")
	flags.StringVar(&a.ca, "nats-ca", "", "file with the certificates that sign those of the NATS servers; given, TLS is demanded")
	flags.StringVar(&a.cert, "nats-cert", "", "certificate file of this client for NATS")
	flags.StringVar(&a.key, "nats-key", "", "key file of that certificate")
	flags.StringVar(&a.domain, "nats-domain", "", "JetStream domain that has the log, as seen through a leaf node")
}

// given tells whether any of it is.
func (a *natsAuth) given() bool { return *a != natsAuth{} }

// options returns what to connect with.
func (a *natsAuth) options() ([]nats.Option, error) {
	ways := 0
	for _, given := range []bool{a.creds != "", a.nkey != "", a.user != "" || a.password != "", a.token != ""} {
		if given {
			ways++
		}
	}
	switch {
	case ways > 1:
		return nil, errors.New("more than one of --nats-creds, --nats-nkey, --nats-user and --nats-token: want one")
	case a.user == "" && a.password != "":
		return nil, errors.New("--nats-password without --nats-user")
	case (a.cert == "") != (a.key == ""):
		return nil, errors.New("--nats-cert and --nats-key go together")
	}
	// Credentials may be renewed while the servers refuse the old ones.
	out := []nats.Option{nats.IgnoreAuthErrorAbort()}
	for flag, path := range map[string]string{"--nats-creds": a.creds, "--nats-nkey": a.nkey, "--nats-ca": a.ca, "--nats-cert": a.cert, "--nats-key": a.key} {
		if path == "" {
			continue
		}
		if _, err := os.Stat(path); err != nil {
			return nil, fmt.Errorf("%s: %w", flag, err)
		}
	}
	if a.creds != "" {
		out = append(out, nats.UserCredentials(a.creds))
	}
	if a.nkey != "" {
		option, err := nats.NkeyOptionFromSeed(a.nkey)
		if err != nil {
			return nil, fmt.Errorf("--nats-nkey: %w", err)
		}
		out = append(out, option)
	}
	if a.user != "" {
		out = append(out, nats.UserInfo(a.user, a.password))
	}
	if a.token != "" {
		out = append(out, nats.Token(a.token))
	}
	if a.ca != "" {
		out = append(out, nats.RootCAs(a.ca))
	}
	if a.cert != "" {
		out = append(out, nats.ClientCert(a.cert, a.key))
	}
	return out, nil
}

// jetstream returns JetStream over a connection, in the domain if there is one.
func (a *natsAuth) jetstream(nc *nats.Conn) (jetstream.JetStream, error) {
	if a.domain != "" {
		return jetstream.NewWithDomain(nc, a.domain)
	}
	return jetstream.New(nc)
}
