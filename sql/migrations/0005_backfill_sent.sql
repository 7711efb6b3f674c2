-- transaction: false
-- Rows the old program has sent: state follows sent_at. Nothing depends on it being finished, since
-- sent_at IS NULL is in every claim; counts and people read better after it.
DO $$
DECLARE
    at_campaign text := '';
    at_member bigint := -9223372036854775808;
    slice record;
    missed int := 1;
BEGIN
    LOOP
        SELECT count(*) AS seen,
               (array_agg(campaign_id ORDER BY campaign_id DESC, member_id DESC))[1] AS last_campaign,
               (array_agg(member_id ORDER BY campaign_id DESC, member_id DESC))[1] AS last_member,
               array_agg(member_id) FILTER (WHERE sent_at IS NOT NULL AND state = 'pending') AS ids
        INTO slice
        FROM (
            SELECT campaign_id, member_id, sent_at, state FROM campaign_targets
            WHERE (campaign_id, member_id) > (at_campaign, at_member)
            ORDER BY campaign_id, member_id LIMIT 2000
        ) AS page;
        EXIT WHEN slice.seen = 0;
        UPDATE campaign_targets SET state = 'sent'
        WHERE (campaign_id, member_id) > (at_campaign, at_member)
          AND (campaign_id, member_id) <= (slice.last_campaign, slice.last_member)
          AND sent_at IS NOT NULL AND state = 'pending' AND slice.ids IS NOT NULL;
        COMMIT;
        at_campaign := slice.last_campaign;
        at_member := slice.last_member;
    END LOOP;
END
$$;
