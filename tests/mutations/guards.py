"""The table of guards: where each stands, how it is taken out, and which tests must turn red."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """A guard removed.

    Attributes:
        guard: its name.
        file: where it stands, below the project's top level.
        old: the text that is the guard.
        new: what it becomes.
        red: the tests of `test_guards.py` that fail without it, all of them and no other
        may: but for these, which it may take along, with the reason beside them.
        after: where to begin to look for `old`; the file's begin if empty.
        places: how many of `old` are meant, counted from there: the arms of one statement.
    """

    guard: str
    file: str
    old: str
    new: str
    red: frozenset[str]
    after: str = ""
    places: int = 1
    may: frozenset[str] = frozenset()


def _guard(
    guard: str,
    file: str,
    old: str,
    new: str,
    *red: str,
    after: str = "",
    places: int = 1,
    may: frozenset[str] = frozenset(),
) -> Mutation:
    return Mutation(guard, f"sender/{file}", old, new, frozenset(red), after, places, may)


_BATCH, _DUE, _LOOK = "CLAIM_BATCH: Final", "CLAIM_DUE: Final", "LOOK: Final"
_FINISH, _EXTEND = "FINISH: Final", "EXTEND: Final"

GUARDS = [
    _guard(
        "SKIP LOCKED, batches",
        "queries/claim.py",
        "FOR NO KEY UPDATE SKIP LOCKED",
        "FOR NO KEY UPDATE",
        "test_a_batch_claim_waits_for_nobody",
        after=_BATCH,
    ),
    _guard(
        "SKIP LOCKED, due rows",
        "queries/claim.py",
        "FOR NO KEY UPDATE SKIP LOCKED",
        "FOR NO KEY UPDATE",
        "test_a_claim_of_due_rows_waits_for_nobody",
        after=_DUE,
    ),
    _guard(
        "lease predicate",
        "queries/claim.py",
        "AND (lease_until IS NULL OR lease_until < statement_timestamp())",
        "",
        "test_a_leased_batch_is_not_claimed",
        after=_BATCH,
        # A pipeline then takes its own batches from itself, if it claims again soon enough.
        may=frozenset(
            {
                "test_a_kill_repeats_no_more_than_was_told",
                "test_a_slot_that_was_missed_is_not_used",
                "test_every_attempt_of_a_member_carries_the_same_key_and_body",
                "test_nothing_comes_between_an_answer_and_its_outcome",
                "test_nothing_is_claimed_while_a_lease_has_ended_with_answers_in_hand",
                "test_slots_in_hand_are_not_used_after_a_429",
            }
        ),
    ),
    _guard(
        "sent_at IS NULL in the claim",
        "queries/claim.py",
        "AND x.sent_at IS NULL",
        "",
        "test_a_row_with_sent_at_is_not_claimed",
        after=_BATCH,
    ),
    _guard(
        "opt-out at the claim",
        "queries/claim.py",
        "AND x.opted_out_at IS NULL",
        "",
        "test_a_row_opted_out_is_not_claimed",
        after=_BATCH,
    ),
    _guard(
        "opt-out at the claim of due rows",
        "queries/claim.py",
        "AND t.opted_out_at IS NULL",
        "",
        "test_a_due_row_opted_out_is_not_claimed",
        after=_DUE,
    ),
    _guard(
        "window check at the claim",
        "queries/claim.py",
        "OR key_used_at > statement_timestamp()",
        "OR true OR key_used_at > statement_timestamp()",
        "test_a_batch_whose_keys_are_too_old_is_not_claimed",
        after=_BATCH,
    ),
    _guard(
        "window check at the claim of due rows",
        "queries/claim.py",
        "OR t.key_used_at > statement_timestamp()",
        "OR true OR t.key_used_at > statement_timestamp()",
        "test_a_due_row_whose_key_is_too_old_is_not_claimed",
        after=_DUE,
    ),
    _guard(
        "window check at the look",
        "pipeline/pacer.py",
        "targets = self._without_old_keys(taken)",
        "targets = taken",
        "test_no_request_begins_under_a_key_that_grew_too_old_in_the_queue",
    ),
    _guard(
        "fence on finish of a batch",
        "queries/record.py",
        "AND b.claim_id = f.claim_id",
        "",
        "test_a_late_finish_of_a_lost_batch_writes_nothing",
        after=_FINISH,
        # Of two fates that then fit one batch, either may be taken.
        may=frozenset({"test_an_answer_to_a_lost_claim_is_not_written_under_the_next_one"}),
    ),
    _guard(
        "fence on finish of a row",
        "queries/record.py",
        "AND t.claim_id = o.claim_id",
        "",
        "test_a_late_finish_of_a_lost_row_writes_nothing",
        after=_FINISH,
    ),
    _guard(
        "fence on extend",
        "queries/record.py",
        "AND b.claim_id = ANY (%(claim_ids)s::uuid[])",
        "",
        "test_a_lost_batch_is_not_extended",
        after=_EXTEND,
    ),
    _guard(
        "opt-out at the look",
        "queries/look.py",
        "AND t.sent_at IS NULL AND t.opted_out_at IS NULL",
        "AND t.sent_at IS NULL",
        "test_the_look_sees_an_opt_out",
        after=_LOOK,
        places=2,
    ),
    _guard(
        "key stable over attempts",
        "domain.py",
        'return f"{campaign_id}:{member_id}"',
        'import time; return f"{campaign_id}:{member_id}:{time.monotonic()}"',
        "test_every_attempt_of_a_member_carries_the_same_key_and_body",
    ),
    _guard(
        "body stable over attempts",
        "providers/http.py",
        "variables = _object_text(target.variables)",
        'variables = _object_text(target.variables).replace(" ", " " * (target.attempts + 2))',
        "test_every_attempt_of_a_member_carries_the_same_key_and_body",
        "test_the_body_is_the_same_to_the_byte_in_every_version",
    ),
    _guard(
        "restore on release of a batch",
        "queries/record.py",
        "WHEN 'release' THEN f.found END",
        "WHEN 'release' THEN b.key_used_at END",
        "test_a_release_leaves_attempts_and_keys_as_they_were_found",
        after=_FINISH,
    ),
    _guard(
        "uncharged release",
        "queries/record.py",
        "attempts = t.attempts + o.charged",
        "attempts = t.attempts + 1",
        "test_a_release_leaves_attempts_and_keys_as_they_were_found",
        after=_FINISH,
    ),
    _guard(
        "uncharged 429",
        "retry.py",
        "target, State.PENDING, delay_s=delay_s, key_used_at=target.key_used_at, reason=reason",
        "target, State.PENDING, charged=True, delay_s=delay_s, reason=reason",
        "test_a_429_costs_no_attempt",
    ),
    _guard(
        "uncharged while the breaker is open",
        "retry.py",
        "charged = not circumstances.uncharged",
        "charged = True",
        "test_a_failing_provider_costs_no_attempt_while_the_breaker_is_open",
    ),
    _guard(
        "breaker counts provider failures only",
        "breaker.py",
        "return isinstance(answer, Unavailable | Unknown | NotSent)",
        'return type(answer).__name__ != "Accepted"',
        "test_refusals_and_throttling_do_not_open_the_breaker",
    ),
    _guard(
        "mass-refusal stop",
        "breaker.py",
        "return self._refused >= _REFUSED_TO_STOP",
        "return False",
        "test_the_run_stops_when_all_is_refused",
    ),
    _guard(
        "shared pace",
        "queries/look.py",
        "ELSE greatest(a.next_free_at, clock_timestamp()) END",
        "ELSE clock_timestamp() END",
        "test_two_processes_share_one_pace",
        after=_LOOK,
    ),
    _guard(
        "expired permits",
        "pace.py",
        "return now - slot_at > _LATE_S",
        "return False",
        "test_a_slot_that_was_missed_is_not_used",
    ),
    _guard(
        "no slot in hand after a 429",
        "pipeline/pacer.py",
        "        self._unslot()\n        self._traffic.block_s = 0.0",
        "        self._traffic.block_s = 0.0",
        "test_slots_in_hand_are_not_used_after_a_429",
    ),
    _guard(
        "hand-over without waiting",
        "pipeline/worker.py",
        "            self._take(answer, permit)",
        "            await __import__('anyio').sleep(0.05)\n            self._take(answer, permit)",
        "test_nothing_comes_between_an_answer_and_its_outcome",
    ),
    _guard(
        "lock order",
        "queries/record.py",
        "ORDER BY t.member_id",
        "ORDER BY t.member_id DESC",
        "test_a_finish_locks_rows_in_the_order_of_their_ids",
        after=_FINISH,
    ),
    _guard(
        "fence on finish is the claim, accepted",
        "queries/record.py",
        "AND s.n = ANY (ARRAY(SELECT n FROM held))",
        "AND EXISTS (SELECT FROM held)",
        "test_an_answer_to_a_lost_claim_is_not_written_under_the_next_one",
        after=_FINISH,
    ),
    _guard(
        "fence on finish is the claim, others",
        "queries/record.py",
        "OR (o.n = ANY (ARRAY(SELECT n FROM held))",
        "OR (EXISTS (SELECT FROM held) AND o.n IS NOT NULL",
        "test_an_answer_to_a_lost_claim_is_not_written_under_the_next_one",
        after=_FINISH,
    ),
    _guard(
        "fence on extend of a row",
        "queries/record.py",
        "AND t.claim_id = ANY (%(claim_ids)s::uuid[]) AND t.state = 'sending'",
        "AND t.state = 'sending'",
        "test_a_lost_row_is_not_extended",
        after=_EXTEND,
        places=2,
    ),
    _guard(
        "extension passes over locked rows",
        "queries/record.py",
        "FOR NO KEY UPDATE SKIP LOCKED",
        "FOR NO KEY UPDATE",
        "test_a_row_locked_by_the_application_keeps_no_lease_from_being_extended",
        after=_EXTEND,
    ),
    _guard(
        "bound of repeats",
        "pipeline/pacer.py",
        "min(self._config.concurrency - out, self._config.repeats_at_most - unrecorded)",
        "self._config.concurrency - out",
        "test_a_kill_repeats_no_more_than_was_told",
    ),
    _guard(
        "age of a failed row's key",
        "retry.py",
        "key_used_at=used,\n            reason=reason,\n        )\n    delay_s",
        "key_used_at=used if doubt else None,\n            reason=reason,\n        )\n    delay_s",
        "test_a_row_failed_by_a_failing_provider_is_not_requeued_into_a_second_mail",
    ),
    _guard(
        "pause at the look",
        "queries/look.py",
        "c.control = 'run'",
        "true",
        "test_the_look_reserves_no_slot_once_the_campaign_is_held",
        after=_LOOK,
    ),
    _guard(
        "pause stops the run",
        "pipeline/stop.py",
        "self.stop_claiming(StopReason.PAUSED)",
        "pass",
        "test_a_campaign_that_is_held_stops_the_run",
        "test_a_pause_is_obeyed_while_the_provider_asked_to_wait",
    ),
    _guard(
        "cancel stops the run",
        "pipeline/stop.py",
        "self.stop_claiming(StopReason.CANCELLED)",
        "pass",
        "test_a_campaign_that_is_held_stops_the_run",
    ),
    _guard(
        "pause while nothing is looked at",
        "pipeline/__init__.py",
        "self._stop.obey(await self._store.control())",
        "await self._store.control()",
        "test_a_pause_is_obeyed_while_the_provider_asked_to_wait",
    ),
    _guard(
        "only a campaign that may be is paused",
        "queries/actions.py",
        "AND f.control = ANY (%(allowed)s)",
        "",
        "test_a_cancelled_campaign_is_not_paused_and_what_was_done_is_recorded",
    ),
    _guard(
        "record of a pause",
        "queries/actions.py",
        "FROM steered s CROSS JOIN found f",
        "FROM steered s CROSS JOIN found f WHERE false",
        "test_a_cancelled_campaign_is_not_paused_and_what_was_done_is_recorded",
    ),
    _guard(
        "record of resolve and requeue",
        "queries/actions.py",
        "FROM settled\n    ORDER BY member_id",
        "FROM settled WHERE false",
        "test_each_row_that_people_settle_has_its_record",
    ),
    _guard(
        "resolve and requeue: the state",
        "queries/actions.py",
        "AND t.state = '{state}' AND t.sent_at IS NULL",
        "AND t.sent_at IS NULL",
        "test_people_settle_rows_of_their_state_only",
        places=2,
    ),
    _guard(
        "resolve and requeue: sent_at IS NULL",
        "queries/actions.py",
        "AND t.state = '{state}' AND t.sent_at IS NULL",
        "AND t.state = '{state}'",
        "test_people_settle_no_row_that_was_sent",
        places=2,
    ),
    _guard(
        "requeue keeps the age of the key",
        "queries/actions.py",
        "\" lost_claims = 0, reason = 'requeued',\"",
        "\" lost_claims = 0, reason = 'requeued', key_used_at = NULL,\"",
        "test_a_requeued_row_keeps_the_age_of_its_key",
        "test_a_row_failed_by_a_failing_provider_is_not_requeued_into_a_second_mail",
        # Without an age there is nothing that the content could contradict.
        "test_a_requeued_row_keeps_what_was_sent_under_its_key",
    ),
    _guard(
        "requeue keeps what was sent under the key",
        "queries/actions.py",
        "content_hash = CASE WHEN t.key_used_at IS NOT NULL THEN t.content_hash END",
        "content_hash = NULL",
        "test_a_requeued_row_keeps_what_was_sent_under_its_key",
    ),
    _guard(
        "requeue gives all attempts again",
        "queries/actions.py",
        "not_before = clock_timestamp(), attempts = 0, unknowns = 0,",
        "not_before = clock_timestamp(),",
        "test_a_requeued_row_has_all_its_attempts_again",
        after="REQUEUE: Final",
    ),
    _guard(
        "resolve as pending frees the key",
        "queries/actions.py",
        "key_used_at = NULL, content_hash = NULL,",
        "",
        "test_a_row_resolved_as_pending_has_a_key_as_new",
    ),
    _guard(
        "resolve as pending: poison goes alone",
        "queries/actions.py",
        "CASE WHEN t.reason = 'lost_too_often' THEN {LOST_TOGETHER} ELSE 0 END",
        "0",
        "test_a_row_lost_too_often_comes_back_alone",
    ),
    _guard(
        "answers in hand before new claims",
        "pipeline/finisher.py",
        "return self._failing or bool(ended - {o.target.lease for o in self._aside})",
        "return self._failing",
        "test_nothing_is_claimed_while_a_lease_has_ended_with_answers_in_hand",
    ),
]
