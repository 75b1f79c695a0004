-- title: Answers with a loop: ids that repeat with one period at least four times
-- unit: share
-- limit: 0.02
-- advice: Speculative decoding that went wrong (accept length near 1), greedy sampling of a small model, or a missing
--   penalty make loops. Compare servers: select server, avg(loops::int) from answers group by server.
SELECT avg(loops::INTEGER) FROM answers;
-- Anywhere in an answer: about 160 ids with a period up to 32, 640 up to 128, 2,560 up to 512 (quality/repetition.py).
-- At its end shorter ones too: the last half of it, at most 256 ids, with a period that fits in four times.

-- examples:
SELECT a.prompt_id, a.server || ', from token ' || loop_at || ' of ' || output_ids_len || ' …'
    || substr(c.text, (length(c.text) * loop_at // output_ids_len)::BIGINT, 120)
FROM (SELECT answers.* FROM answers WHERE loops ORDER BY conversation_id LIMIT 3) a
JOIN completions c USING (conversation_id, turn)
ORDER BY a.conversation_id;
