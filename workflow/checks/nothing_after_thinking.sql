-- title: Answers that end right after their thinking
-- unit: share
-- limit: 0.02
-- reused: apart
-- advice: Look at the stop ids in build.json (model.stop_ids): one of them may be what the model writes after thinking.
SELECT avg((closed AND said_chars = 0)::INTEGER) FROM answers;

-- examples:
SELECT a.prompt_id, right(c.text, 160)
FROM (SELECT answers.* FROM answers WHERE closed AND said_chars = 0 ORDER BY conversation_id LIMIT 3) a
JOIN completions c USING (conversation_id, turn)
ORDER BY a.conversation_id;
