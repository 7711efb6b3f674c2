-- What the old program has sent: state follows sent_at. Nothing waits for this, sent_at IS NULL is
-- in every claim; people who read the table do.
-- Many short transactions over the primary key, 2,000 rows read in each, so it must not be run inside
-- one. A killed run is simply repeated: it reads over what is done and writes nothing there. It never
-- waits for a row and it rests as long as it worked.
DO $$
DECLARE
    page record;
    stale tid[];
    changed int;
    after_campaign text := '';
    after_member bigint := -9223372036854775808;
    end_campaign text;
    end_member bigint;
    again_campaign text;
    again_member bigint;
    began timestamptz;
    rows_read bigint := 0;
    rows_sent bigint := 0;
    passes int := 1;
BEGIN
    -- The end as it is now: a loader may add rows faster than we read them.
    SELECT campaign_id, member_id INTO end_campaign, end_member
    FROM campaign_targets ORDER BY campaign_id DESC, member_id DESC LIMIT 1;

    LOOP
        began := clock_timestamp();
        -- A table that was never analysed would be read and sorted whole, for each slice.
        PERFORM set_config('enable_seqscan', 'off', true);
        PERFORM set_config('enable_bitmapscan', 'off', true);
        SELECT count(*) AS seen,
               count(*) FILTER (WHERE sent_at IS NOT NULL AND state = 'pending') AS stale,
               (array_agg(campaign_id ORDER BY campaign_id DESC, member_id DESC))[1] AS last_campaign,
               (array_agg(member_id ORDER BY campaign_id DESC, member_id DESC))[1] AS last_member
        INTO page
        FROM (
            SELECT campaign_id, member_id, sent_at, state
            FROM campaign_targets
            WHERE (campaign_id, member_id) > (after_campaign, after_member)
              AND (campaign_id, member_id) <= (end_campaign, end_member)
            ORDER BY campaign_id, member_id
            LIMIT 2000
        ) AS slice;

        IF page.seen = 0 THEN
            EXIT WHEN again_campaign IS NULL;
            IF passes >= 10 THEN
                RAISE lock_not_available USING MESSAGE =
                    'rows of campaign_targets with sent_at are locked by other transactions';
            END IF;
            -- Rows that were locked a moment ago: once more from the first of them.
            passes := passes + 1;
            after_campaign := again_campaign;
            after_member := again_member;
            again_campaign := NULL;
            COMMIT;
            PERFORM pg_sleep(0.1 * passes);
            CONTINUE;
        END IF;

        IF page.stale > 0 THEN
            stale := ARRAY(
                SELECT ctid
                FROM campaign_targets
                WHERE (campaign_id, member_id) > (after_campaign, after_member)
                  AND (campaign_id, member_id) <= (page.last_campaign, page.last_member)
                  AND sent_at IS NOT NULL AND state = 'pending'
                FOR NO KEY UPDATE SKIP LOCKED
            );
            UPDATE campaign_targets SET state = 'sent' WHERE ctid = ANY (stale);
            GET DIAGNOSTICS changed = ROW_COUNT;
            rows_sent := rows_sent + changed;
            IF changed < page.stale AND again_campaign IS NULL THEN
                again_campaign := after_campaign;
                again_member := after_member;
            END IF;
        END IF;
        COMMIT;

        after_campaign := page.last_campaign;
        after_member := page.last_member;
        rows_read := rows_read + page.seen;
        IF rows_read % 200000 = 0 THEN
            RAISE INFO '% rows read, % marked as sent', rows_read, rows_sent;
        END IF;
        IF page.stale > 0 THEN
            PERFORM pg_sleep(least(1, extract(epoch FROM clock_timestamp() - began)));
        END IF;
    END LOOP;
    INSERT INTO sender_migrations (version, name) VALUES (5, 'backfill_sent') ON CONFLICT DO NOTHING;
END
$$;
