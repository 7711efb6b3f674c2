"""What `sender migrate` refuses, before it changes anything, and how it says so."""

from collections.abc import Iterator

import psycopg
import pytest
from psycopg import sql

from sender.errors import ConfigurationError, DatabaseUnavailable, SchemaError
from sender.migrate import migrate, plan

BARE = "campaign_id text, member_id bigint, email text, sent_at timestamptz"
KEY = "PRIMARY KEY (campaign_id, member_id)"


def refusal(dsn: str) -> str:
    """What migrate and plan say; makes sure that nothing was changed."""
    with pytest.raises(ConfigurationError) as from_plan:
        plan(dsn)
    with pytest.raises(ConfigurationError) as from_migrate:
        migrate(dsn)
    assert str(from_plan.value) == str(from_migrate.value)
    assert from_migrate.value.exit_code == 78
    return str(from_migrate.value)


def ask(dsn: str, query: str) -> object:
    with psycopg.connect(dsn, autocommit=True) as conn:
        cursor = conn.execute(query.encode())
        return cursor.fetchone() if cursor.description else None


@pytest.mark.parametrize(
    ("table", "faults"),
    [
        (
            f"TABLE campaign_targets ({BARE.replace('bigint', 'uuid')}, {KEY})",
            ["campaign_targets.member_id is uuid, bigint is needed"],
        ),
        (
            f"TABLE campaign_targets ({BARE.replace('timestamptz', 'timestamp')}, {KEY})",
            ["campaign_targets.sent_at is timestamp without time zone", "SET timezone"],
        ),
        (
            f"TABLE campaign_targets ({BARE.replace('email text, ', '')}, {KEY})",
            ["campaign_targets.email is missing; rename the column", "or add it as text"],
        ),
        (
            f"TABLE campaign_targets ({BARE.replace('email text', 'email char(80)')}, {KEY})",
            ["campaign_targets.email is character", "ALTER COLUMN email TYPE text"],
        ),
        (
            (
                "EXTENSION citext; CREATE TABLE campaign_targets"
                f" ({BARE.replace('email text', 'email citext')}, {KEY})"
            ),
            ["campaign_targets.email is citext, text is needed"],
        ),
        (f"TABLE campaign_targets ({BARE})", ["has no primary key", "ADD PRIMARY KEY USING INDEX"]),
        (
            f"TABLE campaign_targets ({BARE}, PRIMARY KEY (member_id, campaign_id))",
            ["has the primary key (member_id, campaign_id)", "drop the old key"],
        ),
        (
            f"TABLE campaign_targets ({BARE}, {KEY}) PARTITION BY LIST (campaign_id)",
            ["campaign_targets is a partitioned table"],
        ),
        (f"UNLOGGED TABLE campaign_targets ({BARE}, {KEY})", ["SET LOGGED"]),
        ("VIEW campaign_targets AS SELECT 1 AS member_id", ["campaign_targets is a view"]),
        (
            f"TABLE campaign_targets ({BARE}, state text, vars json, {KEY})",
            [
                "campaign_targets.state is there already and must be NOT NULL DEFAULT 'pending'",
                "campaign_targets.vars is json, jsonb is needed",
            ],
        ),
        ("TABLE campaigns (name text)", ["campaigns exists and is not of this program"]),
        (
            (
                f"TABLE campaign_targets ({BARE}, CONSTRAINT campaign_targets_state_known"
                f" CHECK (member_id > 0), {KEY})"
            ),
            ["constraint campaign_targets_state_known of campaign_targets exists and is not"],
        ),
        (
            (
                f"TABLE campaign_targets ({BARE}, {KEY});"
                " CREATE INDEX campaign_targets_due ON campaign_targets (email)"
            ),
            ["index campaign_targets_due exists and is not of this program; rename it"],
        ),
        (
            "FUNCTION sender_row_xid(xid) RETURNS int LANGUAGE sql AS 'SELECT 1'",
            ["function sender_row_xid exists and is not of this program"],
        ),
        (
            "TABLE sender_migrations (version text, name text)",
            ["sender_migrations exists and is not of this program; rename it"],
        ),
        (
            "TABLE campaign_targets (campaign_id int, member_id text, sent_at date)",
            ["campaign_id is integer", "member_id is text", "email is missing", "sent_at is date"],
        ),
    ],
)
def test_a_table_that_is_not_ours_is_named_with_each_difference(
    bare_dsn: str, table: str, faults: list[str]
) -> None:
    ask(bare_dsn, f"CREATE {table}")
    before = ask(bare_dsn, "SELECT count(*) FROM pg_class")
    said = refusal(bare_dsn)
    assert [fault for fault in faults if fault not in said] == []
    assert ask(bare_dsn, "SELECT count(*) FROM pg_class") == before


def test_the_refusal_of_a_table_is_about_the_schema(bare_dsn: str) -> None:
    ask(bare_dsn, "CREATE VIEW campaign_targets AS SELECT 1")
    with pytest.raises(SchemaError):
        migrate(bare_dsn)


def test_a_key_is_not_asked_for_over_columns_that_are_not_there(bare_dsn: str) -> None:
    ask(bare_dsn, "CREATE TABLE campaign_targets (campaign_id text, id bigint PRIMARY KEY)")
    assert "CREATE UNIQUE INDEX" not in refusal(bare_dsn)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        ("ALTER TABLE campaign_targets DROP COLUMN vars", "campaign_targets.vars"),
        ("ALTER TABLE campaigns RENAME control TO wish", "campaigns.control"),
        ("DROP TABLE campaign_batches, provider_accounts", "campaign_batches, provider_accounts"),
        ("DELETE FROM sender_migrations WHERE version > 2; DROP TABLE campaigns", "campaigns"),
    ],
)
def test_what_was_migrated_and_is_gone_is_named(dsn: str, damage: str, named: str) -> None:
    ask(dsn, damage)
    assert f"missing in the database, though migrated once: {named}; rename it back" in refusal(dsn)


def test_a_state_that_means_something_else_is_named_where_it_is_met(bare_dsn: str) -> None:
    columns = f"{BARE}, state text NOT NULL DEFAULT 'pending', {KEY}"
    ask(bare_dsn, f"CREATE TABLE campaign_targets ({columns})")
    ask(
        bare_dsn,
        "INSERT INTO campaign_targets (campaign_id, member_id, state) VALUES ('c', 1, 'x')",
    )
    with pytest.raises(SchemaError, match=r"0004 validate: .*correct those rows and migrate again"):
        migrate(bare_dsn)
    ask(bare_dsn, "UPDATE campaign_targets SET state = 'pending'")
    assert migrate(bare_dsn)[0] == "0004 validate"


@pytest.mark.parametrize(
    "columns",
    [
        BARE.replace("bigint", "int"),
        BARE.replace("text", "varchar(200)"),
        BARE.replace("email text", "email address NOT NULL"),
        f"{BARE}, name text, opted_out_at timestamptz",
    ],
)
def test_what_serves_as_well_is_taken(bare_dsn: str, columns: str) -> None:
    ask(bare_dsn, "CREATE DOMAIN address AS text CHECK (value LIKE '%@%')")
    ask(bare_dsn, f"CREATE TABLE campaign_targets ({columns}, {KEY})")
    assert len(migrate(bare_dsn)) == 5


@pytest.fixture
def role(bare_dsn: str) -> Iterator[str]:
    """A role that may do nothing but connect."""
    with psycopg.connect(bare_dsn, autocommit=True) as admin:
        admin.execute("CREATE ROLE app LOGIN")
        admin.execute("REVOKE CREATE ON SCHEMA public FROM PUBLIC")
        yield "app"
        admin.execute("RESET ROLE")
        admin.execute("DROP OWNED BY app")
        admin.execute("DROP ROLE app")


def as_role(dsn: str, role: str) -> str:
    return dsn.replace("postgres@", f"{role}:hunter2@")


def test_a_right_that_is_lacking_is_named_without_the_password(bare_dsn: str, role: str) -> None:
    said = refusal(as_role(bare_dsn, role))
    assert "GRANT CREATE ON SCHEMA public TO app" in said
    assert "hunter2" not in said


def test_who_does_not_own_the_table_learns_who_does(bare_dsn: str, role: str) -> None:
    ask(bare_dsn, f"CREATE TABLE campaign_targets ({BARE}, {KEY})")
    said = refusal(as_role(bare_dsn, role))
    assert "role app does not own campaign_targets; migrate as postgres" in said
    assert "GRANT CREATE" in said


def test_a_role_without_rights_learns_who_migrates(dsn: str) -> None:
    said = refusal(as_role(dsn, "member_api"))
    assert (
        said == "role member_api may not read sender_migrations; migrate as postgres, who made it"
    )


def test_a_role_that_the_server_does_not_know_is_no_reason_to_wait(bare_dsn: str) -> None:
    said = refusal(as_role(bare_dsn, "nobody_knows"))
    assert "DB_DSN: " in said
    assert "nobody_knows" in said
    assert "hunter2" not in said


def test_tables_in_two_schemas_are_refused(bare_dsn: str) -> None:
    ask(bare_dsn, f"CREATE TABLE campaign_targets ({BARE}, {KEY})")
    ask(bare_dsn, "CREATE SCHEMA postgres")
    assert "ALTER ROLE postgres SET search_path = public" in refusal(bare_dsn)


def test_a_read_only_database_is_refused(bare_dsn: str) -> None:
    with psycopg.connect(bare_dsn, autocommit=True) as conn:
        name = sql.Identifier(conn.info.dbname)
        conn.execute(
            sql.SQL("ALTER DATABASE {} SET default_transaction_read_only = on").format(name)
        )
    assert "read-only" in refusal(bare_dsn)


@pytest.mark.parametrize(
    "dsn",
    [
        "postgresql//u:hunter2@host/db",
        "postgresql://u:hunter2@2@host/db",
        "postgresql://u:hunter2/2@host/db",
        "host=h password='hunter2",
        "host=h password=hunter2 port=abc",
    ],
)
def test_a_dsn_that_cannot_be_read_is_not_repeated(dsn: str) -> None:
    with pytest.raises(ConfigurationError, match="DB_DSN") as raised:
        migrate(dsn)
    assert "hunter2" not in repr(raised.value)
    assert raised.value.__cause__ is None


def test_a_database_that_is_away_is_said_to_be(bare_dsn: str) -> None:
    with pytest.raises(DatabaseUnavailable, match="refused") as raised:
        migrate("postgresql://u:hunter2@127.0.0.1:1/db")
    assert "hunter2" not in str(raised.value)
