-- title: Answers whose thinking never ends
-- unit: share
-- limit: 0.12
-- advice: Raise sampling.max_new_tokens (only cut rows are generated again). When they are loops as well, look at sampling
--   and at the servers' accept length.
SELECT CASE WHEN any_value(settings.thinking) THEN avg((NOT closed)::INTEGER) END FROM answers, settings;

-- examples:
SELECT a.prompt_id, right(c.text, 160)
FROM (SELECT answers.* FROM answers, settings WHERE settings.thinking AND NOT closed ORDER BY conversation_id LIMIT 3) a
JOIN completions c USING (conversation_id, turn)
ORDER BY a.conversation_id;
