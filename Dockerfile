# The images of kvmesh: a static binary each, no shell, no root.
#
# `make images` builds the binaries, for any architecture that Go knows, and then
# these images around them, with no base image to pull. The context is dist/image.
#
#   docker buildx build --platform linux/amd64,linux/arm64 -f Dockerfile dist/image
#
# works as well, once `make binaries ARCH=amd64` and `ARCH=arm64` have run.

# NATS, for places where the official image can't be pulled. It takes the flags of
# the official image, keeps its data at the same place, and has a wget, because
# that is what the health check of docker-compose.yml calls in the official one.
FROM scratch AS nats
ARG TARGETARCH
COPY linux-${TARGETARCH}/nats-server /usr/local/bin/nats-server
COPY linux-${TARGETARCH}/wget /usr/bin/wget
COPY --chown=65532:65532 empty /data/
USER 65532:65532
EXPOSE 4222 6222 8222
ENTRYPOINT ["/usr/local/bin/nats-server"]

FROM scratch AS kvmesh
ARG TARGETARCH
COPY linux-${TARGETARCH}/kvmesh /usr/local/bin/kvmesh
COPY --chown=65532:65532 empty /data/
USER 65532:65532
# Only what `docker run -p` opens can be reached from outside of the container.
EXPOSE 8090
ENTRYPOINT ["/usr/local/bin/kvmesh"]
CMD ["serve", "--data-dir", "/data", "--http", "0.0.0.0:8090"]
