-- title: Answers that are equal to the answer to another prompt
-- unit: share
-- limit: 0.05
-- reused: apart
-- advice: A server that answers everything alike is broken or runs another model: look at the server column of the examples.
WITH same AS (SELECT answer_hash FROM answers GROUP BY answer_hash HAVING count(DISTINCT prompt_id) > 1)
SELECT avg((answer_hash IN (FROM same))::INTEGER) FROM answers;

-- examples:
WITH same AS (
    SELECT answer_hash, count(DISTINCT prompt_id) AS times, min(conversation_id) AS conversation_id
    FROM answers GROUP BY answer_hash HAVING times > 1 ORDER BY times DESC, conversation_id LIMIT 3
)
SELECT c.prompt_id, same.times || ' times, ' || c.server || ': ' || left(c.text, 120)
FROM same JOIN completions c USING (conversation_id) WHERE hash(c.output_ids) = same.answer_hash
ORDER BY same.times DESC LIMIT 3;
