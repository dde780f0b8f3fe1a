package api

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/netip"
	"time"

	"github.com/kvmesh/kvmesh/indexer/event"
)

// registration is the body of /register. Names that other services use for the
// same thing are accepted; a tenant and an additional salt are accepted and mean
// nothing here.
type registration struct {
	InstanceID     *instanceID       `json:"instance_id"`
	Endpoint       string            `json:"endpoint"`
	ReplayEndpoint *string           `json:"replay_endpoint"`
	ModelName      string            `json:"model_name"`
	ModelNameAlias string            `json:"modelname"`
	RoutingGroup   *string           `json:"routing_group"`
	BlockSize      json.Number       `json:"block_size"`
	Rank           *uint32           `json:"dp_rank"`
	Topic          *string           `json:"topic"`
	CacheOwner     *string           `json:"cache_owner"`
	Engine         *string           `json:"engine"`
	Labels         map[string]string `json:"labels"`
	TTL            *int64            `json:"ttl_seconds"`
}

func (s *Server) register(r *http.Request) (int, any, error) {
	var b registration
	if err := decodeBody(r.Body, &b); err != nil {
		return 0, nil, err
	}
	w, err := b.worker()
	if err != nil {
		return 0, nil, err
	}
	if confined := w.Confined(); w.CacheOwner != "" && confined != "" && !overLoopback(r) {
		return 0, nil, fmt.Errorf("%w: %s means this host only, and the registration of a worker with a cache_owner came from another: name the host that the engine is on", event.ErrWorker, confined)
	}
	if err := s.registry.Register(r.Context(), w); err != nil {
		return 0, nil, err
	}
	if w.CacheOwner != "" {
		return http.StatusCreated, registered{Status: "ok", CacheOwner: w.CacheOwner, Topic: w.Topic}, nil
	}
	return http.StatusCreated, status{"ok"}, nil
}

type status struct {
	Status string `json:"status"`
}

// registered is the reply to a worker with a cache owner: what its engine has to be
// started with.
type registered struct {
	Status     string `json:"status"`
	CacheOwner string `json:"cache_owner"`
	Topic      string `json:"topic"`
}

// overLoopback tells whether a request came from this host.
func overLoopback(r *http.Request) bool {
	at, err := netip.ParseAddrPort(r.RemoteAddr)
	return err == nil && at.Addr().Unmap().IsLoopback()
}

func (b *registration) worker() (event.Worker, error) {
	size, err := b.BlockSize.Int64()
	if b.BlockSize == "" {
		size, err = 0, nil // reported as missing by Validate
	}
	if err != nil || size < 0 || size > event.MaxBlockSize {
		return event.Worker{}, fmt.Errorf("%w: block_size is %s, want 1 to %d tokens", event.ErrWorker, b.BlockSize, event.MaxBlockSize)
	}
	model := b.ModelName
	if model == "" {
		model = b.ModelNameAlias
	}
	w := event.Worker{
		Source:         event.Source{Model: model, Group: or(b.RoutingGroup, defaultGroup), Rank: or(b.Rank, 0)},
		Endpoint:       b.Endpoint,
		ReplayEndpoint: or(b.ReplayEndpoint, ""),
		Topic:          or(b.Topic, ""),
		Engine:         or(b.Engine, ""),
		BlockSize:      uint32(size),
		CacheOwner:     or(b.CacheOwner, ""),
		Labels:         b.Labels,
	}
	if ttl := or(b.TTL, 0); ttl >= 0 && ttl <= int64(event.MaxTTL/time.Second) {
		w.TTL = time.Duration(ttl) * time.Second
	} else {
		return event.Worker{}, fmt.Errorf("%w: ttl_seconds is %d, want %d to %d, or 0 for no end", event.ErrWorker, ttl, event.MinTTL/time.Second, event.MaxTTL/time.Second)
	}
	if b.InstanceID != nil {
		w.Instance, w.IntegerID = b.InstanceID.text, b.InstanceID.integer
	}
	err = w.Validate()
	w.Complete()
	return w, err
}

// defaultGroup is the routing group of those who name none.
const defaultGroup = "default"

func or[T any](p *T, otherwise T) T {
	if p == nil {
		return otherwise
	}
	return *p
}

// unregistration is the body of /unregister.
type unregistration struct {
	InstanceID     *instanceID `json:"instance_id"`
	ModelName      string      `json:"model_name"`
	ModelNameAlias string      `json:"modelname"`
	RoutingGroup   string      `json:"routing_group"`
	Rank           *uint32     `json:"dp_rank"`
}

func (s *Server) unregister(r *http.Request) (int, any, error) {
	var b unregistration
	if err := decodeBody(r.Body, &b); err != nil {
		return 0, nil, err
	}
	model := b.ModelName
	if model == "" {
		model = b.ModelNameAlias
	}
	if b.InstanceID == nil || model == "" {
		return 0, nil, fmt.Errorf("%w: instance_id and model_name are needed", errRequest)
	}
	if _, err := s.registry.Unregister(r.Context(), b.InstanceID.text, model, b.RoutingGroup, b.Rank); err != nil {
		return 0, nil, err
	}
	return http.StatusOK, status{"ok"}, nil
}
