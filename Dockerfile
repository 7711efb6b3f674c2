# A small image with the program and its locked dependencies: no compiler, no package manager, no
# root, nothing of the tests, the demo or the database.
FROM python:3.13-slim AS build
# Bytecode is made here: the file system of a pod is read-only, and a start costs half the CPU.
ENV UV_COMPILE_BYTECODE=1 UV_LINK_MODE=copy UV_PYTHON_DOWNLOADS=never
RUN pip install --no-cache-dir "uv>=0.9,<1"
WORKDIR /app
# Dependencies first: they change less often than the program. A lock file that does not belong to
# pyproject.toml ends the build.
COPY pyproject.toml uv.lock ./
RUN uv sync --locked --no-dev --no-install-project
COPY README.md LICENSE ./
COPY sql ./sql
COPY sender ./sender
RUN uv sync --locked --no-dev --no-editable

# The slim base holds the certificates of the public authorities, which TLS to provider and database
# is checked against, and the time zones.
FROM python:3.13-slim
RUN pip uninstall --yes --root-user-action=ignore pip
COPY --from=build /app/.venv /app/.venv
ENV PATH=/app/.venv/bin:$PATH PYTHONDONTWRITEBYTECODE=1
# docker build --build-arg REVISION="$(git rev-parse HEAD)" .
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="sender" \
      org.opencontainers.image.description="Mails each member of a campaign exactly once." \
      org.opencontainers.image.licenses="MIT" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION"
# A number, so that runAsNonRoot can be checked.
USER 65532:65532
# Exec form: SIGTERM reaches the program, no shell is in between.
ENTRYPOINT ["/app/.venv/bin/sender"]
CMD ["run"]
