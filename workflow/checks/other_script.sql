-- title: Answers written in another script than their prompt
-- unit: share
-- needs: prompts
-- limit: 0.08
-- advice: Requests for translation are a few percent of chat data. More says that the model ignores the prompt: look at the
--   examples and at the chat template.
SELECT avg(other_script::INTEGER) FROM answers;

-- examples:
SELECT a.prompt_id, left(json_extract_string(p.messages, '$[#-1].content'), 60) || ' → ' || right(c.text, 60)
FROM (SELECT answers.* FROM answers WHERE other_script ORDER BY conversation_id LIMIT 3) a
JOIN completions c USING (conversation_id, turn) JOIN prompts p USING (conversation_id, turn)
ORDER BY a.conversation_id;
