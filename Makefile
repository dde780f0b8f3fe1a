# make            the binary, ./kvmesh
# make images     the images of docker-compose.yml's core profile, without a registry
# make check      everything that has to hold before a change lands
# make release    archives, checksums and SBOM in dist/release

ARCH    ?= $(shell go env GOARCH)
NATS    := github.com/nats-io/nats-server/v2
# The names that docker-compose.yml uses.
NATS_IMAGE   ?= nats:$(patsubst v%,%,$(shell go list -m -f '{{.Version}}' $(NATS)))-alpine
KVMESH_IMAGE ?= kvmesh:latest

image  := dist/image
static := CGO_ENABLED=0 GOOS=linux GOARCH=$(ARCH) go build -buildvcs=auto -trimpath -ldflags='-s -w'

.PHONY: kvmesh binaries images check release clean

kvmesh:
	go build ./cmd/kvmesh

binaries:
	mkdir -p $(image)/linux-$(ARCH) $(image)/empty
	$(static) -o $(image)/linux-$(ARCH)/kvmesh ./cmd/kvmesh
	$(static) -o $(image)/linux-$(ARCH)/nats-server $(NATS)
	$(static) -o $(image)/linux-$(ARCH)/wget ./integration/wget

images: binaries
	docker build -q --build-arg TARGETARCH=$(ARCH) --target nats -t $(NATS_IMAGE) -f Dockerfile $(image)
	docker build -q --build-arg TARGETARCH=$(ARCH) --target kvmesh -t $(KVMESH_IMAGE) -f Dockerfile $(image)

check:
	.ci/run

release:
	.ci/release

clean:
	rm -rf dist kvmesh
