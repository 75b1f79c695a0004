-- title: Answers without thinking although thinking is on
-- unit: share
-- limit: 0.05
-- reused: apart
-- advice: Check that the prompt ends in an opened think block (select prompt_ids from completions), that the model thinks
--   at all, and that the chat template is the model's own.
SELECT CASE WHEN any_value(settings.thinking) THEN avg((thought_chars = 0)::INTEGER) END FROM answers, settings;

-- examples:
SELECT a.prompt_id, c.text
FROM (SELECT answers.* FROM answers, settings WHERE settings.thinking AND thought_chars = 0 ORDER BY conversation_id LIMIT 3) a
JOIN completions c USING (conversation_id, turn)
ORDER BY a.conversation_id;
