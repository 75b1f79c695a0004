-- title: Answers that begin as a refusal
-- unit: share
-- limit: 0.08
-- severity: warning
-- advice: Refusals teach a drafter little that is wrong; many of them say that the prompts are, or that a system prompt is.
SELECT avg(refuses::INTEGER) FROM answers;

-- examples:
SELECT a.prompt_id, left(ltrim(replace(c.text, '</think>', '')), 120)
FROM (SELECT answers.* FROM answers WHERE refuses ORDER BY conversation_id LIMIT 3) a
JOIN completions c USING (conversation_id, turn)
ORDER BY a.conversation_id;
