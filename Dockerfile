# A small image with the program and its locked dependencies: no compiler, no package manager of
# ours, no root.
FROM python:3.13-slim AS build
ENV UV_COMPILE_BYTECODE=1 UV_LINK_MODE=copy UV_PYTHON_DOWNLOADS=never
RUN pip install --no-cache-dir "uv>=0.9,<1"
WORKDIR /app
# Dependencies first: they change less often than the program.
COPY pyproject.toml uv.lock README.md LICENSE ./
RUN uv sync --frozen --no-dev --no-install-project
COPY sender ./sender
COPY sql ./sql
RUN uv sync --frozen --no-dev --no-editable

FROM python:3.13-slim
COPY --from=build /app/.venv /app/.venv
ENV PYTHONDONTWRITEBYTECODE=1
# A number, so that runAsNonRoot can be checked.
USER 65532:65532
# Exec form: SIGTERM reaches the program, no shell is in between.
ENTRYPOINT ["/app/.venv/bin/sender"]
CMD ["run"]
