package api

import (
	"encoding/json"
	"fmt"
	"net/http"
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
	if err := s.registry.Register(r.Context(), w); err != nil {
		return 0, nil, err
	}
	return http.StatusCreated, status{"ok"}, nil
}

type status struct {
	Status string `json:"status"`
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
	return w, w.Validate()
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
