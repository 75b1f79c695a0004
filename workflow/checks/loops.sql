-- title: Answers that end in a loop (the last ids repeat with a short period at least four times)
-- unit: share
-- limit: 0.02
-- advice: Speculative decoding that went wrong (accept length near 1), greedy sampling of a small model, or a missing
--   penalty make loops. Compare servers: select server, avg(loops::int) from answers group by server.
SELECT avg(loops::INTEGER) FROM answers;

-- examples:
SELECT a.prompt_id, a.server || ' …' || right(c.text, 120)
FROM (SELECT answers.* FROM answers WHERE loops ORDER BY conversation_id LIMIT 3) a
JOIN completions c USING (conversation_id, turn)
ORDER BY a.conversation_id;
