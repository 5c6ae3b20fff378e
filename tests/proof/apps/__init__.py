"""The programs that the campaign runs and kills: producers, and the applications of the workers."""
